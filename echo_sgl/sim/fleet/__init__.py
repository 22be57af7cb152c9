"""Fleets: prefill and decode on instances of their own, with and without OOCO's two pools."""
