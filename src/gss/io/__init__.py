"""What lies on disk and on which device."""
