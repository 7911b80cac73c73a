"""What dashboards share: lane charts, the live strip and its gauges, the newest-wins worker, and wording."""
