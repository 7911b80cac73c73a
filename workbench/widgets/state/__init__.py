"""The state behind the widgets, in plain Python: settings, what is offered, predictions, and what is drawn of them."""
