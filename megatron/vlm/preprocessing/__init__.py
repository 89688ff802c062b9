"""From conversations, images and videos to a dataset folder, once, before training."""
