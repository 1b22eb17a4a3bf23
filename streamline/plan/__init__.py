"""From what a user wrote to a plan, its rules, its fingerprint and its pictures."""
