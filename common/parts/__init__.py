"""Parts, each of which one flag brings to a run. The core (`common/`) imports a part only where its
flag is read, so a part can be deleted together with its flag and its tests."""
