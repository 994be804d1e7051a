"""What a run takes of memory and time, from shapes and settings alone. Pure: no model, no clock, no I/O."""
