"""What only one family of models needs of us: how its images become tiles, and layers that others do not have."""
