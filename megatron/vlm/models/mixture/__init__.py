"""Mixtures of experts: routers, and the dispatch of rows to experts."""
