"""Screenshots by the packages of this environment: the trainings of the suite, here."""

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

from test_image_agents import folders, test_a_client_that_sends_screenshots_is_trained

__all__ = ["folders", "test_a_client_that_sends_screenshots_is_trained"]
