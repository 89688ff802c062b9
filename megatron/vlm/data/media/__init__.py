"""Images and videos: files, what is seen of them, and at which size."""
