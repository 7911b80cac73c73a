"""Parts of dashboards: lane charts, the live strip and its gauges, the newest-wins worker, and wording."""
