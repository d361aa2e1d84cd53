//! Parameters of kernels: one plain structure each, passed by value, with the layout of its namesake in `csrc`.

/// Declares a parameter structure. Its fields are plain data and leave no gap between them: Rust and CUDA C++ then lay
/// it out alike, and every byte is written.
macro_rules! kernel_params {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $($(#[$field_meta])* $field_vis $field: $type),* }

        const _: () = {
            const fn plain<T: bytemuck::Pod>() {}
            $(plain::<$type>();)*
            assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "gaps between the fields");
        };
        // SAFETY: all fields are plain data, and zeros are a value of each.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: `repr(C)`, all fields are plain data, and there are no gaps, as asserted.
        unsafe impl bytemuck::Pod for $name {}
    };
}
pub(crate) use kernel_params;

#[cfg(test)]
mod tests {
    kernel_params! {
        /// Two widths, no gap.
        struct Two { addr: u64, rows: u32, eps: f32 }
    }

    #[test]
    fn a_structure_is_its_fields_bytes() {
        let two = Two { addr: 0x0102_0304_0506_0708, rows: 9, eps: 1.0 };
        let bytes = bytemuck::bytes_of(&two);
        assert_eq!(bytes[..8], two.addr.to_ne_bytes());
        assert_eq!((&bytes[8..12], &bytes[12..]), (&two.rows.to_ne_bytes()[..], &two.eps.to_ne_bytes()[..]));
    }
}
