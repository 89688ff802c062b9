"""Makes a dataset folder of conversations, images and videos, once, before training."""
