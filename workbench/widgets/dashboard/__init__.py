"""The dashboard: controls, predicted curves that follow them, and a live run."""
