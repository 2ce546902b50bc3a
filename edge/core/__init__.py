"""What the edge decides. Pure: no I/O, no clock, no event loop; everything is fed and answers."""
