"""``evenstep doctor``: what would slow down or end a long run on this machine, and the fix."""
