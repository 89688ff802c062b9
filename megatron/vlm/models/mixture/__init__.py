"""Mixtures of experts: routers, and the way of rows through experts."""
