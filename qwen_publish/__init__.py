"""What prints and ships the course: saved outputs, the site, talks, the demo, the download. No lesson imports it."""
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
