"""`farandole demo`: the main job of Farandole, to watch. It is a test that people look at, so it uses the tools of
farandole.testing."""
