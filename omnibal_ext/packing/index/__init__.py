"""The packed index: writing, opening, measuring; which pack runs where in any iteration."""
