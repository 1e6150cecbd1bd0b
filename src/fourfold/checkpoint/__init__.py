"""What a run leaves on disk, written by any grid and read by any other."""
