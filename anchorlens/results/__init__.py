"""Numbers with named axes, their intervals, and how they are drawn."""
