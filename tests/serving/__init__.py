"""Tests of the service that collects feedback."""
