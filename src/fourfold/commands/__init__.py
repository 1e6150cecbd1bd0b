"""What the commands are called, take and say of themselves; what they do is in `train`. Nothing here imports torch."""
