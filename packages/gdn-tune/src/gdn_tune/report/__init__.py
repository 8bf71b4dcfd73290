"""``gdn-tune report``: tables and plots of what benches, the tuner and the emulator's counters wrote."""
