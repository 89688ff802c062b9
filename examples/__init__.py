"""Programs to start from: loops of others on balanced packs, and the demo."""
