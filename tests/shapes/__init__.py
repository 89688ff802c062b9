"""A device that exists only in shapes: what a GPU would be asked, without one."""
