"""Where evaluations find what is committed, and where they put what they make."""

from __future__ import annotations

from pathlib import Path

EVAL_DIR = Path(__file__).resolve().parent
RESULTS_DIR = EVAL_DIR / "results"
PROFILES_DIR = EVAL_DIR / "profiles"
SAMPLES_DIR = EVAL_DIR / "data"

CLONE_DIR = EVAL_DIR.parent
CONFIGS_DIR = CLONE_DIR / "configs"
BUILD_DIR = CLONE_DIR / "build"
LOGS_DIR = BUILD_DIR / "logs"
MODELS_DIR = BUILD_DIR / "models"
