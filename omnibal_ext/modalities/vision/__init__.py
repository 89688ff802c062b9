"""Images and videos, as tiles or patches: how an encoder sees them."""
