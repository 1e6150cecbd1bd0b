"""What watches over a run: what each rank did last, deadlines, whose fault it was."""
