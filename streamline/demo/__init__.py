"""`streamline demo`: kill a trainer half-way, resume it, and compare with a run that was left alone."""
