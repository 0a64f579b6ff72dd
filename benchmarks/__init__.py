"""Measurements beside other people's programs, and the page of results: not installed with the
package.
"""
