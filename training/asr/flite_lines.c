/* Reads "voice<TAB>stretch<TAB>pitch<TAB>text" lines, writes int32 rate, int32 samples and the int16 samples of each.

   gcc -O2 -static flite_lines.c -o flite_lines -lflite_cmu_us_slt -lflite_cmu_us_awb -lflite_cmu_us_kal \
       -lflite_cmu_us_kal16 -lflite_usenglish -lflite_cmulex -lflite -lm -Wl,--unresolved-symbols=ignore-all

   One process speaks thousands of sentences without a start-up each, and runs where no flite is installed. What stays
   unresolved is the library's sound output, which nothing here calls. */
#include <flite/flite.h>
#include <stdio.h>
#include <string.h>

cst_voice *register_cmu_us_slt(const char *);
cst_voice *register_cmu_us_awb(const char *);
cst_voice *register_cmu_us_kal(const char *);
cst_voice *register_cmu_us_kal16(const char *);

int main(void) {
    char line[4096];
    flite_init();
    cst_voice *voices[] = {register_cmu_us_slt(0), register_cmu_us_awb(0), register_cmu_us_kal(0), register_cmu_us_kal16(0)};
    while (fgets(line, sizeof line, stdin)) {
        int number, start;
        float stretch, pitch;
        if (sscanf(line, "%d\t%f\t%f\t%n", &number, &stretch, &pitch, &start) != 3 || number < 0 || number > 3) return 2;
        char *text = line + start;
        text[strcspn(text, "\n")] = 0;
        feat_set_float(voices[number]->features, "duration_stretch", stretch);
        feat_set_float(voices[number]->features, "f0_shift", pitch);
        cst_wave *wave = flite_text_to_wave(text, voices[number]);
        int head[2] = {wave->sample_rate, wave->num_samples};
        fwrite(head, sizeof(int), 2, stdout);
        fwrite(wave->samples, sizeof(short), wave->num_samples, stdout);
        fflush(stdout);
        delete_wave(wave);
    }
    return 0;
}
