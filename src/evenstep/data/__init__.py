"""Data: sources, the decoded cache, augmentation and the Loader."""
