"""PaddleOCR-VL."""
