"""``blink doctor``: what this machine has, and lacks, for the way in which Blink is to run on it."""
