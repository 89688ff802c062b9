"""What several families share."""
