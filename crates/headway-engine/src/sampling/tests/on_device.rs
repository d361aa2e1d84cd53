//! Rows between the device and the host.

use super::model_like;
use crate::sampling::{DeviceChoices, Row, Sampler, SamplingParams};
use headway_tensor::{Exec, Result, RowChoice, RowSampler, TensorMut};

/// A device that takes even rows alone, and has no answer for row 4.
#[derive(Default)]
struct Even(Vec<(usize, f64)>);

impl RowSampler for Even {
    fn push(&mut self, choice: &RowChoice<'_>) -> bool {
        let takes = choice.row.is_multiple_of(2);
        if takes {
            self.0.push((choice.row, choice.uniform));
        }
        takes
    }
    fn choose(&mut self, _: &dyn Exec, _: TensorMut<'_>, tokens: &mut Vec<Option<u32>>) -> Result<()> {
        tokens.extend(self.0.drain(..).map(|(row, _)| (row != 4).then_some(row as u32 + 100)));
        Ok(())
    }
    fn clear(&mut self) {
        self.0.clear();
    }
    fn bytes(&self) -> usize {
        0
    }
}

#[test]
fn rows_that_the_device_does_not_answer_are_the_hosts() {
    let drawn = SamplingParams::default();
    let told = SamplingParams { logprobs: Some(0), ..SamplingParams::default() };
    let greedy = SamplingParams::greedy();
    let mut choices = DeviceChoices::default();
    for _ in 0..2 {
        let mut device = Even::default();
        choices.begin(7);
        assert!(!choices.any());
        let params = [&drawn, &drawn, &told, &drawn, &drawn, &drawn, &greedy];
        for (i, params) in params.into_iter().enumerate() {
            choices.ask(&mut device, i, &Row { drafted: &[4], ..Row::new(params, &[1, 2, 3], 9) });
        }
        let drawn = crate::sampling::uniform(9, 4);
        assert_eq!(
            device.0,
            [(0, drawn), (4, drawn), (6, 0.0)],
            "the number of seed and position; none if greedy"
        );
        assert!(choices.any());
        let found = |tokens: &mut Vec<Option<u32>>| -> std::result::Result<(), ()> {
            tokens.extend([Some(100), None, Some(106)]);
            Ok(())
        };
        choices.take(found).unwrap();
        let of = |row| choices.token(row);
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6, 7].map(of),
            [Some(100), None, None, None, None, None, Some(106), None]
        );
    }
}

/// What a device is given is all that the host's sampler reads: the same row twice is the same token.
#[test]
fn a_row_for_the_device_says_all_that_the_host_reads() {
    struct Keeps(Vec<(f32, usize, f32, f32, f32, Vec<u32>)>);
    impl RowSampler for Keeps {
        fn push(&mut self, c: &RowChoice<'_>) -> bool {
            self.0.push((c.temperature, c.top_k, c.top_p, c.min_p, c.repetition_penalty, c.history.concat()));
            true
        }
        fn choose(&mut self, _: &dyn Exec, _: TensorMut<'_>, _: &mut Vec<Option<u32>>) -> Result<()> {
            Ok(())
        }
        fn clear(&mut self) {}
        fn bytes(&self) -> usize {
            0
        }
    }
    let params = SamplingParams {
        temperature: 0.5,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.01,
        repetition_penalty: 1.2,
        ..SamplingParams::default()
    };
    let row = Row { drafted: &[9], ..Row::new(&params, &[7, 8], 3) };
    let (mut device, mut choices) = (Keeps(vec![]), DeviceChoices::default());
    choices.begin(1);
    choices.ask(&mut device, 0, &row);
    let (temperature, top_k, top_p, min_p, repetition_penalty, history) = device.0.remove(0);
    let same =
        SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, ..SamplingParams::default() };
    let again = Row::new(&same, &history, 3);
    let token = |row: &Row<'_>| Sampler::new().sample(&mut model_like(500, 1), row).unwrap().token;
    assert_eq!(token(&row), token(&again));
}

/// Rows that only the host's sampler does right.
#[test]
fn bias_counting_penalties_and_short_answers_are_the_hosts() {
    let base = SamplingParams::default();
    let asked = |params: &SamplingParams, tokens: &[u32]| {
        let (mut device, mut choices) = (Even::default(), DeviceChoices::default());
        choices.begin(1);
        choices.ask(&mut device, 0, &Row { prompt_len: 2, ..Row::new(params, tokens, 0) });
        choices.any()
    };
    assert!(asked(&base, &[1, 2, 3]));
    for params in [
        SamplingParams { presence_penalty: 0.1, ..base.clone() },
        SamplingParams { frequency_penalty: -0.1, ..base.clone() },
        SamplingParams { logit_bias: [(3, 1.0)].into(), ..base.clone() },
    ] {
        assert!(!asked(&params, &[1, 2, 3]), "{params:?}");
    }
    let short = SamplingParams { min_tokens: 2, ..base };
    assert!(!asked(&short, &[1, 2, 3]));
    assert!(asked(&short, &[1, 2, 3, 4]), "it may end now");
}
