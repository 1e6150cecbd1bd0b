"""Where training samples come from and which of them a rank reads."""
