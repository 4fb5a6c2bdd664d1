"""The sizes of screen on which pages are looked at, in pixels."""

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
