"""LightOnOCR."""
