"""What layers cost: measured, or counted from operations."""
