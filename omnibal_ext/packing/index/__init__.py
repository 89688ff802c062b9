"""The packed index: written, opened, measured; and which pack runs where, in any iteration."""
