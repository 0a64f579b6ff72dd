"""Counters, Prometheus metrics and OpenTelemetry spans."""
