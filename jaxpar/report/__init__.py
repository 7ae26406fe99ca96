"""Showing results: tables for a terminal, a page for a browser. Computes nothing."""
