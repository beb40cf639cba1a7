"""Flash drivers: a regular file or block device, opened O_DIRECT, as a `doca_shims.api.FlashDevice`."""
