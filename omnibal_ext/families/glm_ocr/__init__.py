"""GLM-OCR."""
