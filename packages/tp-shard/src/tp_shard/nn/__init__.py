"""Layers whose parameters are split over ranks."""
