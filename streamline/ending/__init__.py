"""How the ranks of a job end together, so that none waits for another one's gradients for ever."""
