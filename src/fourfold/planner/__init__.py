"""What a training step costs, before anything runs."""
