"""The quickstart's demo: its conversations, and how well a trained model reads the held-out ones."""
