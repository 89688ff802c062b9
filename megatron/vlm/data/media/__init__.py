"""Files of images, videos and sounds: whether they are complete, and what of them is read."""
