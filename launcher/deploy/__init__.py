"""Motley onto hosts: wheel, environments, versions."""
