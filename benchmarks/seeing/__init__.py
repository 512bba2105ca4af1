"""What it takes to look inside: records, monitors, pictures and pages."""
